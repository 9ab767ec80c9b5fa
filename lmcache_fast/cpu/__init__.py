"""The backend `cpu`: the kernel sources compiled for the host at first use. Importing this package compiles nothing."""
