//! Plans of models.

use std::time::{Duration, Instant};

use lz_graph::plan::ablation::ablation;
use lz_graph::plan::{Instance, OfOps, Sharing, plan};

use crate::graphs::{Kernels, assert_valid, gpt2, symbols};

#[test]
fn the_plan_of_gpt2_meets_its_bound() {
    let graph = gpt2(12, 12);
    for s in [1, 16, 128, 512] {
        let instance = Instance::of(&graph, &symbols(&[("s", s)])).unwrap();
        let demands = OfOps::of(&instance);
        let found = plan(&instance, &demands);
        assert_valid(&instance, &found, &demands);
        // Nothing lives past its layer but the residual stream, so the bound can be met exactly.
        assert_eq!(found.arena, found.bound, "{s} tokens");
    }
}

#[test]
fn the_ablation_has_a_row_for_each_choice_and_none_is_below_the_plan() {
    let graph = gpt2(2, 12);
    let instance = Instance::of(&graph, &symbols(&[("s", 64)])).unwrap();
    let demands = OfOps::of(&instance);
    let (rows, found) = (ablation(&instance, &demands), plan(&instance, &demands));
    assert_eq!(rows.len(), 4 * 3 * 5);
    assert!(rows.iter().all(|row| row.bound <= row.arena && row.arena >= found.arena));
    let smallest = |sharing| rows.iter().filter(|row| row.choice.sharing == sharing).map(|row| row.arena).min();
    assert!(smallest(Sharing::InPlace) < smallest(Sharing::Nothing));
}

fn median(mut run: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..51)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed()
        })
        .collect();
    times.sort();
    times[25]
}

/// Prints arenas, bounds and times. Run with `--ignored --nocapture`.
#[test]
#[ignore = "prints measurements"]
fn measure() {
    for (layers, heads) in [(2, 12), (12, 12)] {
        let graph = gpt2(layers, heads);
        for s in [16, 64, 128, 256, 512] {
            let at = symbols(&[("s", s)]);
            let instance = Instance::of(&graph, &at).unwrap();
            let mut kernels = Kernels::of(&instance);
            let found = plan(&instance, &kernels);
            kernels.strided = true;
            let strided = plan(&instance, &kernels);
            println!(
                "{layers} layers, {} nodes, s={s}: arena {} KB, bound {} KB, {:?}; with strides {} KB of {} KB; \
                 instance {:?}, plan {:?}",
                instance.order().len(),
                found.arena / 1024,
                found.bound / 1024,
                found.choice,
                strided.arena / 1024,
                strided.bound / 1024,
                median(|| drop(Instance::of(&graph, &at).unwrap())),
                median(|| drop(plan(&instance, &kernels))),
            );
            if s == 64 || s == 512 {
                for row in ablation(&instance, &OfOps::of(&instance)) {
                    println!("  {:?} {} {}", row.choice, row.arena, row.bound);
                }
            }
        }
    }
}
