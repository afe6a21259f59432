"""The parts of a decoding step: request, sequences, candidate tree, forward pass, verification; and the sources of drafts."""
