"""Files of arrays from which any box can be read: safetensors, npy, npz, HDF5 and Zarr."""
