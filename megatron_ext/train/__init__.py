"""Megatron-core adapters: they reshape and call `ops` and `collectives`. One subject per module, as in `ops`."""
