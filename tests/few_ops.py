"""Three convolutions, whose searches compile in a fourth of the time of all twelve.

With attention, with batch statistics and without weights; the tests of the SuperNet
have all twelve.
"""

FEW_OPS = ("GATConv", "GINConv", "APPNP")
