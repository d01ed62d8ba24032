"""`python -m edgeinfer`."""

from edgeinfer.cli.app import main

main()
