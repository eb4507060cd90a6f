"""The primitives: linear data movements between partitions, each with its exact adjoint."""

from distdl_jax.primitives.all_gather import all_gather as all_gather
from distdl_jax.primitives.all_gather import reduce_scatter as reduce_scatter
from distdl_jax.primitives.all_reduce import all_max as all_max
from distdl_jax.primitives.all_reduce import all_reduce as all_reduce
from distdl_jax.primitives.all_sum_reduce import all_sum_reduce as all_sum_reduce
from distdl_jax.primitives.all_to_all import all_to_all as all_to_all
from distdl_jax.primitives.argmax import argmax as argmax
from distdl_jax.primitives.broadcast import broadcast as broadcast
from distdl_jax.primitives.circular_shift import roll as roll
from distdl_jax.primitives.halo_exchange import halo_exchange as halo_exchange
from distdl_jax.primitives.reductions import max as max
from distdl_jax.primitives.reductions import mean as mean
from distdl_jax.primitives.reductions import min as min
from distdl_jax.primitives.reductions import std as std
from distdl_jax.primitives.reductions import sum as sum
from distdl_jax.primitives.reductions import var as var
from distdl_jax.primitives.repartition import repartition as repartition
from distdl_jax.primitives.reshape import reshape as reshape
from distdl_jax.primitives.sum_reduce import sum_reduce as sum_reduce
from distdl_jax.primitives.take import segment_sum as segment_sum
from distdl_jax.primitives.take import take as take
from distdl_jax.primitives.top_k import top_k as top_k
