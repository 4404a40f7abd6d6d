//! Which process of how many this is, as launchers tell it in the environment. Knows no sockets.

use super::WorldError;

/// A process's place among those that train together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Number of this process, from 0.
    pub rank: usize,
    /// Processes in all.
    pub size: usize,
    /// Number of this process on its machine: its GPU.
    pub local_rank: usize,
    /// Host and port of the first process.
    pub master: (String, u16),
}

const RANK: &str = "RANK";
const SIZE: &str = "WORLD_SIZE";
const LOCAL: &str = "LOCAL_RANK";
const ADDRESS: &str = "MASTER_ADDR";
const PORT: &str = "MASTER_PORT";

impl Place {
    /// From RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as torchrun, Kubernetes'
    /// PyTorchJob and Slurm scripts set them; `None` where a process is started without, or alone.
    /// LOCAL_RANK is 0 if not given: one GPU a machine.
    pub fn from_env() -> Result<Option<Self>, WorldError> {
        Self::read(|name| std::env::var(name).ok())
    }

    /// The same from other variables.
    pub(super) fn read(get: impl Fn(&str) -> Option<String>) -> Result<Option<Self>, WorldError> {
        if get(RANK).is_none() && get(SIZE).is_none_or(|size| size.trim() == "1") {
            return Ok(None);
        }
        let needed = [RANK, SIZE, ADDRESS, PORT];
        let missing: Vec<_> = needed.into_iter().filter(|name| get(name).is_none()).collect();
        let number = |name: &'static str, below: usize| -> Result<usize, WorldError> {
            let value = get(name).unwrap_or_default();
            let parsed = value.trim().parse().ok().filter(|&number| number < below);
            parsed.ok_or(WorldError::Value { name, value, below })
        };
        if missing == [ADDRESS, PORT] && number(SIZE, usize::MAX)? == 1 {
            return Ok(None);
        }
        if !missing.is_empty() {
            let set = needed.into_iter().filter(|name| get(name).is_some()).collect();
            return Err(WorldError::HalfSet { set, missing });
        }
        let size = number(SIZE, usize::MAX)?;
        let place = Self {
            rank: number(RANK, size)?,
            size,
            local_rank: if get(LOCAL).is_some() { number(LOCAL, size)? } else { 0 },
            master: (get(ADDRESS).unwrap_or_default(), number(PORT, 1 << 16)? as u16),
        };
        Ok((size > 1).then_some(place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<Place>, WorldError> {
        Place::read(|name| {
            let found = variables.iter().find(|(key, _)| *key == name);
            found.map(|(_, value)| (*value).to_owned())
        })
    }

    const FOUR: [(&str, &str); 5] = [
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "node-0"),
        ("MASTER_PORT", "29500"),
    ];

    #[test]
    fn launchers_are_understood() {
        let place = read(&FOUR).unwrap().unwrap();
        let master = ("node-0".to_owned(), 29500);
        assert_eq!(place, Place { rank: 3, size: 4, local_rank: 1, master });
        let without_local: Vec<_> =
            FOUR.into_iter().filter(|(name, _)| *name != "LOCAL_RANK").collect();
        assert_eq!(read(&without_local).unwrap().unwrap().local_rank, 0);
        assert_eq!(read(&[]).unwrap(), None);
        assert_eq!(read(&[("WORLD_SIZE", "1")]).unwrap(), None);
        assert_eq!(read(&[("WORLD_SIZE", "1"), ("RANK", "0")]).unwrap(), None);
    }

    #[test]
    fn a_half_set_environment_is_named() {
        let error = read(&FOUR[..2]).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("MASTER_ADDR, MASTER_PORT") && text.contains("RANK, WORLD_SIZE"));
        assert_eq!(error.exit_code(), 78);
        let error = read(&FOUR[1..2]).unwrap_err();
        assert!(error.to_string().contains("RANK"), "{error}");
    }

    #[test]
    fn a_rank_outside_the_world_is_refused() {
        for (name, value) in [("RANK", "4"), ("RANK", "-1"), ("WORLD_SIZE", "x")] {
            let mut variables = FOUR;
            variables.iter_mut().filter(|(key, _)| *key == name).for_each(|pair| pair.1 = value);
            let text = read(&variables).unwrap_err().to_string();
            assert!(text.contains(name) && text.contains(value), "{text}");
        }
    }
}
