"""The demo: a small model's KV cache through a connector in every layout, checked bit for bit by raw indexing."""

from .connectors import ALL, CONNECTORS, DemoConnector
from .run import DemoResult, run_demo

__all__ = ["ALL", "CONNECTORS", "DemoConnector", "DemoResult", "run_demo"]
