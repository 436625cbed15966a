"""Paths and small models that the tests share. Nothing is downloaded; the tiny model is built once under runs/."""
import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # several small processes: one thread each is quicker than two that wait
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
