"""The profile of a plan: the solved program told as calls and memory in time (`autopar.timeline.profile`).

In: a formulated step and the decision about it. Out: a `Profile`, whose seconds by stage and stream are the accounts that were priced, and whose largest memory is the
peak that the rows bound. Where something lies in the step is in places.py, who runs when in calls.py, what memory holds in memory.py. Torch-free.
"""
