"""Fields are moved in another order on one worker, as in a loop over a set: all calls fit each other.

workers: 2
says: The workers' programs differ. In the plan of shifted
says: passes fields['rho'], but worker 1 is in
says: passes fields['vp']
says: look for a loop over a set
"""

from parts import P, dj, jnp, rank


@dj.jit
def shifted(fields):
    names = ["rho", "vp"] if rank == 0 else ["vp", "rho"]
    return {name: dj.functional.roll(fields[name], P, 1, 0) for name in names}


shifted({"rho": jnp.zeros(2), "vp": jnp.ones(2)})
