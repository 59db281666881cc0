"""The executable specification: plain PyTorch, CPU, slow, readable.

Only elementwise + - * /, casts, comparisons and copies of torch are used, and its fp64 sqrt: torch's own sum, matmul, softmax,
sigmoid, exp, log, pow and fp32 sqrt change bits with length, offset, stride or padding on CPU.
"""
