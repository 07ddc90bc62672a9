"""Built-in hosts: small standard networks that contain no Esper code.

A host is an `nn.Module` whose `sites()` maps slot ids `r{row}c{col}` to module names, in execution order.
Hosts are grafted like any other model. Read `cnn.py` first.
"""

from __future__ import annotations

from esper.kasmina.hosts.cnn import CNNHost
from esper.kasmina.hosts.mlp import MLPHost
from esper.kasmina.hosts.transformer import TransformerHost

AnyHost = CNNHost | MLPHost | TransformerHost

HOSTS: dict[str, type[AnyHost]] = {"cnn": CNNHost, "mlp": MLPHost, "transformer": TransformerHost}

__all__ = ["HOSTS", "AnyHost", "CNNHost", "MLPHost", "TransformerHost"]
