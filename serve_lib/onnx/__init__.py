"""A back end of the engine: stages translated to ONNX, run by ONNX Runtime."""
