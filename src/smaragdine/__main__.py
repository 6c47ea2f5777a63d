import sys

from smaragdine.cli.main import main

sys.exit(main())
