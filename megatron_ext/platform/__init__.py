"""Facts about devices, and what a device needs of the engines. One module per device; nothing happens at import."""
