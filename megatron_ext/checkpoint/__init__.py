"""Checkpoints as logical tensors: Hugging Face folders and Megatron's torch_dist folders, read and written tensor by tensor.

A logical tensor has its Hugging Face name and shape, whatever holds it. Nothing here needs a process group or a model in memory.
"""
