"""ComfyUI's workflows: their facts, which benchmarks/recording/record_workflows.py lists from the recordings."""

from __future__ import annotations

import json

from vaemem._common import shipped
from vaemem.pipelines.components import Pipeline

# Under the names of the pipelines of diffusers with the same models.
WORKFLOWS = {name: Pipeline(**facts) for name, facts in json.loads(shipped("generated", "workflows.json")).items()}
