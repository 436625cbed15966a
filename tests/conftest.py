"""Paths and small models that the tests share. Nothing is downloaded; the tiny model is built once under runs/."""
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
