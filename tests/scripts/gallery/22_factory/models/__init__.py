from .registry import create_model, register_model
from . import nets
