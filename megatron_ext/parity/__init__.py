"""logdiff, digests and the driver that starts both engines and compares them bit for bit."""
