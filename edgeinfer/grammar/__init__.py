"""What an answer may look like: grammars and JSON Schemas, followed byte by byte. Knows neither models nor sampling."""
