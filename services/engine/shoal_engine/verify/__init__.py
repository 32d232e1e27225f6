"""DSpark's planner: how many drafts each choice verifies, and whether any are made. Numpy only; changes no token."""

from shoal_engine.verify.agreement import BudgetAgreement, OneRank, StepIntent
from shoal_engine.verify.allocate import allocate
from shoal_engine.verify.budget import Budget, budget
from shoal_engine.verify.calibration import Calibration, CalibrationError, ModeCalibration
from shoal_engine.verify.cost import CostModel, CostTable, FlatCosts
from shoal_engine.verify.gate import DraftGate
from shoal_engine.verify.planned import PlannedWidth
from shoal_engine.verify.survival import survival

__all__ = [
    "Budget",
    "BudgetAgreement",
    "Calibration",
    "CalibrationError",
    "CostModel",
    "CostTable",
    "DraftGate",
    "FlatCosts",
    "ModeCalibration",
    "OneRank",
    "PlannedWidth",
    "StepIntent",
    "allocate",
    "budget",
    "survival",
]
