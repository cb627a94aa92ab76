"""What a rewritten step takes, read off its graphs: a check on the integer program that shares none of its coefficients.

In: partitioned graphs and a cost model. Out: seconds by stage and account (price.py); a step as records that `autopar.timeline.replay`
replays on streams, with exposed communication and the peak of memory (simulator.py); bytes that fused kernels write (written_bytes.py).
"""
