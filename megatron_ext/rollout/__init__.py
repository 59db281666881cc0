"""vLLM adapters: they reshape what vLLM hands them and call `ops` and `collectives`; no arithmetic of their own.

plugin.py is the entry point (vllm.general_plugins), engine.py what a trainer holds.
"""
