"""The demo: a small model's KV cache through a connector in every layout, checked bit for bit by raw indexing."""

from .connectors import CONNECTORS, DemoConnector, whole_model
from .run import DemoResult, run_demo

__all__ = ["CONNECTORS", "DemoConnector", "DemoResult", "run_demo", "whole_model"]
