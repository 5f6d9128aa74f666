"""`python -m quantizer` is the console script."""

from quantizer.cli.main import main

main()
