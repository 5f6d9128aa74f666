"""Words for a layer's tensors: "weights", "bias", "activation", "input", with a suffix where
the layer has several.
"""

from collections.abc import Mapping
from typing import cast

from quantizer.config.model import Role

ROLE_OF: Mapping[str, Role] = {
    "input_tensors": "input",
    "output_tensors": "activation",
    "weight": "weights",
    "bias": "bias",
}
"""The role of a tensor, by the hierarchical form's key for it."""

KEY_OF = {role: key for key, role in ROLE_OF.items()}
"""The hierarchical form's key for a tensor, by its role."""


def base_role(role: str) -> Role:
    """Return the word that a config has for a tensor.

    >>> base_role("input_1"), base_role("weights_hh_l0"), base_role("bias")
    ('input', 'weights', 'bias')
    """
    return cast(Role, role.partition("_")[0])


def channels_role(first: int, length: int) -> str:
    """Return the role of some channels of a layer's output, which are observed by themselves.

    >>> channels_role(4, 3)
    'activation_4_7'
    """
    return f"activation_{first}_{first + length}"


def is_of_channels(role: str) -> bool:
    """Return whether a role is one of `channels_role`.

    >>> is_of_channels("activation_4_7"), is_of_channels("activation")
    (True, False)
    """
    return role.startswith("activation_")


def is_parameter(role: str) -> bool:
    """Return whether the tensor belongs to the layer and needs no data."""
    return base_role(role) in ("weights", "bias")


def parameter_name(role: str) -> str:
    """Return torch's name of the parameter in a role.

    >>> parameter_name("weights"), parameter_name("weights_hh_l0"), parameter_name("bias")
    ('weight', 'weight_hh_l0', 'bias')
    """
    return role.replace("weights", "weight", 1)


def parameter_role(name: str) -> str:
    """Return the role of a parameter by torch's name.

    >>> parameter_role("weight"), parameter_role("weight_hh_l0"), parameter_role("bias_ih_l0")
    ('weights', 'weights_hh_l0', 'bias_ih_l0')
    """
    return name.replace("weight", "weights", 1) if name.startswith("weight") else name
