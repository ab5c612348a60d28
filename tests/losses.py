"""The losses by short names."""

import liger_losses

CE = liger_losses.LigerFusedLinearCrossEntropyLoss
DPO = liger_losses.LigerFusedLinearDPOLoss
CPO = liger_losses.LigerFusedLinearCPOLoss
SimPO = liger_losses.LigerFusedLinearSimPOLoss
ORPO = liger_losses.LigerFusedLinearORPOLoss
KTO = liger_losses.LigerFusedLinearKTOLoss
BCO = liger_losses.LigerFusedLinearBCOLoss
GRPO = liger_losses.LigerFusedLinearGRPOLoss
JSD = liger_losses.LigerFusedLinearJSDLoss
KL = liger_losses.LigerFusedLinearKLLoss
ReverseKL = liger_losses.LigerFusedLinearReverseKLLoss
TVD = liger_losses.LigerFusedLinearTVDLoss
AlphaBeta = liger_losses.LigerFusedLinearAlphaBetaLoss
Cosine = liger_losses.LigerFusedLinearCosineSimilarityLoss
MiniLLM = liger_losses.LigerFusedLinearMiniLLMLoss
