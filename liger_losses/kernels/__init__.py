"""One file per kernel: the torch reference and the one public function over it."""
