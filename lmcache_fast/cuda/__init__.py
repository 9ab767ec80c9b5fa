"""The backend `cuda`: csrc compiled at run time, and a pipeline of short launches and copies between host and device."""
