"""Our own hosts: small ordinary networks to grow, without a trace of Esper inside.

A host is an `nn.Module` whose `sites()` names the places where slots may go: slot id `r{row}c{col}` to
module name, in execution order. They are grafted like anybody's model. Start with `cnn.py`.
"""

from __future__ import annotations

from esper.kasmina.hosts.cnn import CNNHost
from esper.kasmina.hosts.mlp import MLPHost
from esper.kasmina.hosts.transformer import TransformerHost

AnyHost = CNNHost | MLPHost | TransformerHost

HOSTS: dict[str, type[AnyHost]] = {"cnn": CNNHost, "mlp": MLPHost, "transformer": TransformerHost}

__all__ = ["HOSTS", "AnyHost", "CNNHost", "MLPHost", "TransformerHost"]
