"""JSON by JavaScript."""

from _engine import dumps as dumps
from _engine import loads as loads
