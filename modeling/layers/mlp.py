"""Feed-forward layers."""

from torch import Tensor, nn

from configs.architectures.base import Activation
from modeling.adapters.linear import AdapterColumnLinear, AdapterRowLinear
from modeling.adapters.product import AdapterData
from modeling.layers.activation import ACTIVATIONS
from modeling.layers.fused import fused_ops, rounded_for
from sharding.group import Summand


class GatedMLP(nn.Module):
    """down( act(gate x) * (up x) ), gate and up as one product (arXiv:2002.05202)."""

    def __init__(
        self, gate_up_proj: AdapterColumnLinear, down_proj: AdapterRowLinear, activation: Activation
    ) -> None:
        """gate_up_proj: two parts of equal size, gate first."""
        super().__init__()
        self.gate_up_proj = gate_up_proj
        self.down_proj = down_proj
        self._act = ACTIVATIONS[activation]
        self._is_silu = activation in (Activation.SILU, Activation.SWISH)

    def forward(self, hidden_states: Tensor, adapter_data: AdapterData | None) -> Tensor:
        """[tokens, hidden] to the same shape, equal on every rank."""
        out: Tensor = self.down_proj(self._inner(hidden_states, adapter_data), adapter_data)
        return out

    def unsummed(self, hidden_states: Tensor, adapter_data: AdapterData | None) -> Tensor | Summand:
        """As `forward`, for a norm that may sum over ranks itself."""
        return self.down_proj.unsummed(self._inner(hidden_states, adapter_data), adapter_data)

    def _inner(self, hidden_states: Tensor, adapter_data: AdapterData | None) -> Tensor:
        """[tokens, hidden] to this rank's act(gate x) * (up x), [tokens, n]."""
        reader = self.down_proj.base.stored
        if self._is_silu and reader.rounded_type(hidden_states) is None:
            gate_up, inner = self.gate_up_proj.gated(hidden_states, adapter_data)
        else:
            gate_up, inner = self.gate_up_proj(hidden_states, adapter_data), None
        fused = fused_ops(gate_up.device) if self._is_silu else None
        if fused is not None and inner is None:
            rounded = rounded_for(reader, gate_up)
            inner = fused.silu_mul(gate_up, rounded=rounded)
            if rounded is not None:
                reader.take_rounded(inner, *rounded)
        elif inner is None:
            gate, up = gate_up.chunk(2, dim=-1)
            inner = self._act(gate) * up
        return inner


class PlainMLP(nn.Module):
    """down( act(up x) )."""

    def __init__(
        self, up_proj: AdapterColumnLinear, down_proj: AdapterRowLinear, activation: Activation
    ) -> None:
        """up_proj: one part."""
        super().__init__()
        self.up_proj = up_proj
        self.down_proj = down_proj
        self._act = ACTIVATIONS[activation]

    def partial(self, hidden_states: Tensor, adapter_data: AdapterData | None) -> Tensor:
        """[tokens, hidden] to this rank's summand of the same shape."""
        inner: Tensor = self.up_proj(hidden_states, adapter_data)
        return self.down_proj.partial(self._act(inner), adapter_data)

    def forward(self, hidden_states: Tensor, adapter_data: AdapterData | None) -> Tensor:
        """[tokens, hidden] to the same shape, equal on every rank."""
        inner: Tensor = self.up_proj(hidden_states, adapter_data)
        out: Tensor = self.down_proj(self._act(inner), adapter_data)
        return out
