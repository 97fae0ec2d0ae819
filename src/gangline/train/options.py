"""Strict base class of training options: frozen, and unknown fields are errors."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class TrainingOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
