"""The convolutions that take the partitions of one algorithm only."""

from __future__ import annotations

from distdl_jax.nn.conv import DistributedConv1d, DistributedConv2d, DistributedConv3d, DistributedConv4d


class DistributedFeatureConv1d(DistributedConv1d):
    """`DistributedConv1d` that refuses partitions which ask for another algorithm than the feature one."""

    required_kind = "feature"


class DistributedFeatureConv2d(DistributedConv2d):
    """`DistributedConv2d` that refuses partitions which ask for another algorithm than the feature one."""

    required_kind = "feature"


class DistributedFeatureConv3d(DistributedConv3d):
    """`DistributedConv3d` that refuses partitions which ask for another algorithm than the feature one."""

    required_kind = "feature"


class DistributedFeatureConv4d(DistributedConv4d):
    """`DistributedConv4d` that refuses partitions which ask for another algorithm than the feature one."""

    required_kind = "feature"


class DistributedChannelConv1d(DistributedConv1d):
    """`DistributedConv1d` that refuses partitions which ask for another algorithm than the channel one."""

    required_kind = "channel"


class DistributedChannelConv2d(DistributedConv2d):
    """`DistributedConv2d` that refuses partitions which ask for another algorithm than the channel one."""

    required_kind = "channel"


class DistributedChannelConv3d(DistributedConv3d):
    """`DistributedConv3d` that refuses partitions which ask for another algorithm than the channel one."""

    required_kind = "channel"


class DistributedChannelConv4d(DistributedConv4d):
    """`DistributedConv4d` that refuses partitions which ask for another algorithm than the channel one."""

    required_kind = "channel"


class DistributedGeneralConv1d(DistributedConv1d):
    """`DistributedConv1d` that refuses partitions which ask for another algorithm than the general one."""

    required_kind = "general"


class DistributedGeneralConv2d(DistributedConv2d):
    """`DistributedConv2d` that refuses partitions which ask for another algorithm than the general one."""

    required_kind = "general"


class DistributedGeneralConv3d(DistributedConv3d):
    """`DistributedConv3d` that refuses partitions which ask for another algorithm than the general one."""

    required_kind = "general"


class DistributedGeneralConv4d(DistributedConv4d):
    """`DistributedConv4d` that refuses partitions which ask for another algorithm than the general one."""

    required_kind = "general"
