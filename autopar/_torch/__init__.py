"""Private torch APIs: the only room that imports them. It absorbs the differences between versions (torch >= 2.11).

In: what the rest asks for by these names. Out: what torch does. **A private API goes into the file of its subject**: fake tensors (fakes.py), attention (attention.py), calls of fx graphs (nodes.py),
dynamo (language.py, effects.py, regions.py), the joint graph of AOTAutograd (export.py), Inductor (inductor.py), process groups and DTensors (distributed.py), groups that break and are made anew (regroup.py, sockets.py), what DTensors cannot do (dtensors.py), norms of gradients (clipping.py), effects in graphs (tokens.py), sizes that vary (symbols.py).
"""

from autopar._torch.attention import prefers_cudnn_attention
from autopar._torch.clipping import norms_over
from autopar._torch.cuda_code import Kernel, codes_for_cuda, is_taken, kernels_of
from autopar._torch.distributed import (
    alias_process_group,
    collectives,
    default_store,
    default_timeout,
    dtensor,
    dtensor_spec,
    exchanged,
    has_host,
    is_open,
    let_go_of_groups,
    local_tensor,
    new_group,
    orderly,
    process_group,
    unalias_process_groups,
    wrapped,
)
from autopar._torch.dtensors import dtensors_beside_tensors
from autopar._torch.effects import Effect, Notes, global_module_hooks
from autopar._torch.export import describe_io, explain_capture_failure, export_joint, pytree, saved_by_min_cut
from autopar._torch.fakes import (
    check_recorded_values,
    failures_untold,
    fake_mode_of,
    fresh_fake,
    is_fake,
    new_fake_mode,
    storage_of,
    with_strides,
)
from autopar._torch.inductor import (
    boxed,
    compile_inner,
    decompose_late,
    decomposed_late,
    import_compiler,
    inductor_cache_counts,
    invoke_subgraph,
    keep_strides,
)
from autopar._torch.marks import Marks, marks_of
from autopar._torch.nodes import (
    compiled_when_called,
    draws_random,
    drop_dead_code,
    get_attribute,
    getitem,
    is_getitem,
    is_operator,
    is_pure,
    line_of,
    results_of,
    without_dead_code,
)
from autopar._torch.optimizers import Step as OptimizerStep
from autopar._torch.optimizers import adjusted_lr, orthogonalized, replace_muon_step, replace_steps_by_elements
from autopar._torch.parameters import hooks_of, move_parameter, quiet_without_gradient, set_hooks
from autopar._torch.patched import other_code, replaced_composites
from autopar._torch.pickles import restricted_reader
from autopar._torch.record import recorded
from autopar._torch.regions import TorchDispatchMode, leave_region, region_of
from autopar._torch.regroup import join_group, leave_groups, placeholder_group
from autopar._torch.sockets import note_between, own_endpoints, shut_sockets, watch_sockets
from autopar._torch.subclass import plainly, without_memory
from autopar._torch.symbols import SymbolicValues, Symbols, concrete, expressions, fill_sizes, number, symbolic

__all__ = [
    "Effect",
    "Kernel",
    "Marks",
    "Notes",
    "OptimizerStep",
    "SymbolicValues",
    "Symbols",
    "TorchDispatchMode",
    "adjusted_lr",
    "alias_process_group",
    "boxed",
    "check_recorded_values",
    "codes_for_cuda",
    "collectives",
    "compile_inner",
    "compiled_when_called",
    "concrete",
    "decompose_late",
    "decomposed_late",
    "default_store",
    "default_timeout",
    "describe_io",
    "draws_random",
    "drop_dead_code",
    "dtensor",
    "dtensor_spec",
    "dtensors_beside_tensors",
    "exchanged",
    "explain_capture_failure",
    "export_joint",
    "expressions",
    "failures_untold",
    "fake_mode_of",
    "fill_sizes",
    "fresh_fake",
    "get_attribute",
    "getitem",
    "global_module_hooks",
    "has_host",
    "hooks_of",
    "import_compiler",
    "inductor_cache_counts",
    "invoke_subgraph",
    "is_fake",
    "is_getitem",
    "is_open",
    "is_operator",
    "is_pure",
    "is_taken",
    "join_group",
    "keep_strides",
    "kernels_of",
    "leave_groups",
    "leave_region",
    "let_go_of_groups",
    "line_of",
    "local_tensor",
    "marks_of",
    "move_parameter",
    "new_fake_mode",
    "new_group",
    "norms_over",
    "note_between",
    "number",
    "orderly",
    "orthogonalized",
    "other_code",
    "own_endpoints",
    "placeholder_group",
    "plainly",
    "prefers_cudnn_attention",
    "process_group",
    "pytree",
    "quiet_without_gradient",
    "recorded",
    "region_of",
    "replace_muon_step",
    "replace_steps_by_elements",
    "replaced_composites",
    "restricted_reader",
    "results_of",
    "saved_by_min_cut",
    "set_hooks",
    "shut_sockets",
    "storage_of",
    "symbolic",
    "unalias_process_groups",
    "watch_sockets",
    "with_strides",
    "without_dead_code",
    "without_memory",
    "wrapped",
]
