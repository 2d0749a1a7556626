"""``python -m e2e.cluster``."""

import sys

try:
    from e2e.cluster.cli import main
except ModuleNotFoundError as error:
    if error.name != "yaml":
        raise
    print("error: needs PyYAML: install it (pip install pyyaml), or use the project's .venv", file=sys.stderr)
    raise SystemExit(2) from None

raise SystemExit(main())
