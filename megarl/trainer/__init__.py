"""The trainer: Megatron-Core, one rank per process."""
