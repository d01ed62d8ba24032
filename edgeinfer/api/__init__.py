"""The public Python API: assembles the parts that do not know each other. A command is one of these with printing."""
