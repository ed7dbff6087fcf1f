"""What every test sees."""

import os
import sys

if os.environ.get("VAEMEM_NO_TORCH"):  # under sanitizers: tests that import these skip, by name
    sys.modules["torch"] = sys.modules["diffusers"] = None  # type: ignore[assignment]
