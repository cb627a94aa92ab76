"""Custom ops and Triton kernels, each with an eager reference, a fake, a backward and a sharding rule."""
