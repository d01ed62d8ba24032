"""The command line: parse, call, print. The one place that prints or exits."""
