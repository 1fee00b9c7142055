"""What a clip of the tiny model's world shows and sounds like, read by code from its decoded frames and samples."""
