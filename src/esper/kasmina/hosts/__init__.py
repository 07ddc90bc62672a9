"""Built-in hosts: small standard networks that contain no Esper code.

A host is an `nn.Module` whose `sites()` maps slot ids `r{row}c{col}` to module names, in execution order.
Hosts are grafted like any other model. Read `cnn.py` first.
"""

from __future__ import annotations

from esper.kasmina.hosts.cnn import CNNHost
from esper.kasmina.hosts.host import Host
from esper.kasmina.hosts.mlp import MLPHost
from esper.kasmina.hosts.resnet import ResidualCNNHost
from esper.kasmina.hosts.transformer import TransformerHost

HOSTS: dict[str, type[Host]] = {
    "cnn": CNNHost,
    "mlp": MLPHost,
    "transformer": TransformerHost,
    "resnet": ResidualCNNHost,
}
"""The built-in hosts by name; the first one for a kind of data is its default."""

__all__ = ["HOSTS", "CNNHost", "Host", "MLPHost", "ResidualCNNHost", "TransformerHost"]
