"""What ties the connectors to the inference engines; each engine's package imports that engine only when it is used."""
