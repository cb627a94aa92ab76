"""Training watched: what a plan predicts beside what is measured, as numbers, and as a timeline.

In: a compiled model that runs. Out: reports, for people and for TensorBoard or W&B, and traces for Perfetto. A model that nobody watches has none of it. **Add here** a measurement.
"""
