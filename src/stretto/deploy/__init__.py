"""Out of the process: answers in bulk, over HTTP, and as ONNX graphs."""
