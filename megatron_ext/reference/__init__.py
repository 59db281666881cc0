"""The executable specification: plain PyTorch, CPU, slow, readable.

Only elementwise + - * / sqrt, casts, comparisons and copies of torch are used: torch's own sum, matmul, softmax, sigmoid,
exp, log and pow change bits with length, offset, stride or padding on CPU.
"""
