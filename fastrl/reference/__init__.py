"""The oracle: plain torch, no tricks, any floating dtype. Tests compare with it; the torch backend runs it."""
