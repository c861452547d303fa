"""Empties dgl.graphbolt in the environment that runs this script (tox -e dgl21).

The wheels of DGL 2.x ship graphbolt compiled for a handful of torch versions and refuse any other at import. Nothing
that edgeless uses needs it. Only a throw-away environment may be changed like this; a program does the same for itself
with ``edgeless.dgl.graphbolt.stub()``.
"""

import importlib.util
import sys
from pathlib import Path

if sys.prefix == sys.base_prefix:
    raise SystemExit("stub_graphbolt.py changes the installed dgl and runs in a virtual environment only")
dgl = importlib.util.find_spec("dgl")
if dgl is None:
    raise SystemExit("stub_graphbolt.py: dgl is not installed here")
init = Path(dgl.origin).parent / "graphbolt" / "__init__.py"
init.write_text('"""Emptied for a torch that it was not compiled for."""\n')
print(f"emptied {init}")
