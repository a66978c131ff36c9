"""megarl_kernels: hand-written kernels, each beside its plain-torch reference. Imports nothing of megarl."""
