"""Arrow's functions on columns: they are made on import, where no type checker sees them."""

from typing import Any

import pyarrow.compute

pc: Any = pyarrow.compute
