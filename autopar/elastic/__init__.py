"""Training that goes on when processes are lost: by those that are left, from the step before, with the curve of a run that lost nobody.

In: a module compiled with `autopar.compile(elastic=Elastic(...))`, its optimizer, batches. Out: `Session` (session.py), whose steps are done again after a loss. supervisor.py
starts the workers and says who is left, member.py hears it; copies.py keeps a partner's shard, protocol.py says which version is whole, recover.py moves it by the
arithmetic of boxes.py; ahead.py has the steps for other numbers of ranks. growth.py is the supervisor's part in letting processes join, newcomer.py theirs, program.py what they must have in common
with the members. The rule and its cases: docs/elastic.md. **What else is to outlive a process goes into state.py.**
"""

from autopar.elastic.options import Elastic
from autopar.elastic.session import Recovery, Session

__all__ = ["Elastic", "Recovery", "Session"]
