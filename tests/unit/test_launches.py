"""Launches in a module that Inductor wrote are counted as often as they are called."""

from __future__ import annotations

from benchmarks.launches import launched

CODE = '''
triton_a = async_compile.triton('triton_a', """def triton_a(): triton_a.run()""")
def repeated_0(args):
    triton_a.run(buf0, 4, stream=stream0)
    extern_kernels.mm(buf0, arg1, out=buf1)
    return (buf1,)
class Runner:
    def partition_0(self, args):
        buf2 = torch.ops.autopar.attention_v2.default(buf1)
        triton_b.run(buf2, 4, stream=stream0)
        return (buf2,)
    def call(self, args):
        buf0 = empty_strided_cuda((4,), (1,), torch.float32)
        (buf1,) = repeated_0([buf0])
        (buf1,) = repeated_0([buf1])
        (buf2,) = self.partition_0([buf1])
        triton_a.run(buf2, 4, stream=stream0)
        return (reinterpret_tensor(buf2, (2, 2), (2, 1), 0),)
'''


def test_repeated_layers_count_as_often_as_they_are_called() -> None:
    assert launched(CODE) == {"triton": 4, "library": 3}
